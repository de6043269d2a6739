"""What only the driver runs, while Snakemake reads the rules: configuration, code, sources, plan."""
