package socket

// Break has Run end with an error.
func (w *Waiter) Break() error { return w.file.Close() }
