"""The paper's experiments, run again: 8-bit data types beside 32 bit, same seeds, same batches.

    python -m experiments list
    python -m experiments run mnist --data_dir D --seeds 0..4
    horovodrun -np 2 python -m experiments run mnist/data_real --data_dir D

What there is to run stands in configurations/*.yaml, what has been run in results/*.csv: a finished run is a row there,
and only runs without a row are run. docs/results.md shows the tables; docs/make_results.py writes it from the rows.
"""
