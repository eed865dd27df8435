package main

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Programs that read the table rely on these bytes.
func TestSharesGolden(t *testing.T) {
	args := []string{"shares", "--scenario", "drain", "--rule", "sqrt", "--seeds", "2", "--output"}
	testkit.Golden(t, "testdata/shares.table", []byte(mustRun(t, "", append(args, "table")...)))
}
