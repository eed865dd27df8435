// Package printing writes to standard output.
package printing

import "fmt"

// Say prints.
func Say(s string) string {
	fmt.Println(s) // want "fmt.Println"
	println(s)     // want "builtin println"
	return fmt.Sprint(s)
}
