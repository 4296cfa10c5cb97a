"""What ships with the experiments: public-domain books, recall tasks, the models' vocabulary and the small models."""
