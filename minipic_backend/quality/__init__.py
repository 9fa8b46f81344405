"""How far spans' answers are from full attention's: what `minipic bench quality` measures."""
