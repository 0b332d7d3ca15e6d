"""The tokenized set's Arrow schema: one row is one sample, at most 5 bytes a token."""

import pyarrow as pa

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),  # row, or row#turn (tokenize/samples.py); unique in the set
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("truncated", pa.bool_()),
    ]
)
