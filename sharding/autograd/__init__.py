"""What a thread is inside of: autograd's hooks and transforms, and the named axes of mapped
functions.
"""
