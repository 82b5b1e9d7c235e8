"""`make nightly`: all long tests, in as many pieces as it takes, and one row of counts in `results/nightly.jsonl`."""
