package main

import (
	"context"
	"os"

	"github.com/srtm-io/srtm/internal/lifecycle"
)

func main() {
	os.Exit(lifecycle.Main("srtm", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	}))
}
