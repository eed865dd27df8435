package metadata

// AppendFrom has changes appended to a file of so many bytes.
func (f *File) AppendFrom(bytes int64) { f.minWhole = bytes }
