"""Records to tables, figures, claims and a report. No torch, no GPU, no network; reads nothing but the records."""
