"""Device side: step programs, decode state, pools, memory, mesh. Imports config, scheduler, models,
kernels_pallas."""
