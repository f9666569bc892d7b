"""What a thread is inside of: autograd's hooks and transforms, and mapped functions' axes."""
