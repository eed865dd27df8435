// Package impure is imported.
package impure

// Path is a constant.
const Path = "/"
