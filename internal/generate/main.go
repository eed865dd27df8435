// Command generate writes the Go of api/srtm/*/*.proto (proto.go) and then docs/flags.md
// (flags.go). `make generate` runs it.
package main

import (
	"fmt"
	"os"
)

func main() {
	err := writeProto("api")
	if err == nil {
		err = writeFlags() // builds the daemons with the new Go
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}
