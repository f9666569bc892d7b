"""What a training loop needs beside model and optimizer: clipping, norms, averages, loss scaling, batches."""
