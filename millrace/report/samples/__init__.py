"""The texts of a run, as Parquet."""
