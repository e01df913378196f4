"""Results over commits: a store, change points, plots and where to look for the commit that changed a metric."""
