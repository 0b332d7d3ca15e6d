"""What checks annotations, tensor shapes included, while the tests run: beartype, with an int where a float is wanted."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
