"""What checks annotations while the tests run, tensor shapes included: beartype, an int passing for a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
