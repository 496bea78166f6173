"""ReDrafter's heads (arXiv 2403.09919): a recurrent state over drafted tokens, beside the model's last hidden state."""
