"""A LoRA adapter that teaches a model a technique's attention, distilled from the model itself."""
