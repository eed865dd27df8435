// Package two has two comments.
package two
