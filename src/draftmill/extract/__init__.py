"""The frozen target: loaded, read at its taps, and served for generation.

in    a Hugging Face folder (or a GGUF file, converted once by `convert`)
out   features in flight (`taps`), never on disk; answers over loopback HTTP (`serve`)
story target.load_target -> taps.TapReader.read
"""
