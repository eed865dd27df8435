// Package bucket reads recorded arrivals and applies one contract to them, whole or split
// over several buckets. tokenbucket has the buckets and tbadaptor/share divides the
// shares. This package assigns messages to buckets and summarizes the delays. read.go has
// the file format, assign.go the assignment.
package bucket
