"""The plots of the report: plain numbers in, Vega-Lite specifications out. Nothing here draws or reads records."""
