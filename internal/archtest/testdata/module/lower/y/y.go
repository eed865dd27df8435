// Package y imports nothing.
package y
