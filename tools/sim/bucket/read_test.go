package bucket_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/sim/bucket"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestRead(t *testing.T) {
	got, err := bucket.Read("f", strings.NewReader("0\n0.5,g1\r\n\n 1.25 , g1 , p7 \n-3,,p8\n1e-3,\n1700000000.123456789,g2"))
	testkit.Must(t, err)
	want := []bucket.Arrival{
		{At: 0},
		{At: 500_000_000, Key: "g1"},
		{At: 1_250_000_000, Key: "g1", Publisher: "p7"},
		{At: -3_000_000_000, Publisher: "p8"},
		{At: 1_000_000},
		{At: 1_700_000_000_123_456_789, Key: "g2"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("read %v\nwant %v", got, want)
	}
}

func TestTimesAreExact(t *testing.T) {
	for text, want := range map[string]mono.Time{
		"0": 0, "-0": 0, "+1": 1e9, ".5": 5e8, "5.": 5e9, "0.1": 1e8, "0.0000000014": 1, "0.0000000015": 2, "0.9999999999": 1e9,
		"-0.0000000015": -2, "1e-9": 1, "1E3": 1e12, "2.5e-5": 25_000, "4000000000": 4e18, "-4000000000": -4e18,
		"0.12345678901234567890": 123_456_789,
	} {
		got, err := bucket.Read("f", strings.NewReader(text))
		if err != nil || got[0].At != want {
			t.Errorf("%q is %v (%v), want %d ns", text, got, err, want)
		}
	}
}

func TestTimesAgreeWithFractions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`[+-]?[0-9]{1,9}(\.[0-9]{0,14})?`).Draw(t, "text")
		got := testkit.Result(bucket.Read("f", strings.NewReader(text))).Must(t)
		exact, ok := new(big.Rat).SetString(strings.TrimSuffix(text, "."))
		if !ok {
			t.Fatalf("%q is no number to compare with", text)
		}
		off := new(big.Rat).SetInt64(int64(got[0].At))
		off.Sub(off, exact.Mul(exact, big.NewRat(1e9, 1)))
		if off.Abs(off).Cmp(big.NewRat(1, 2)) > 0 {
			t.Fatalf("%q was read as %d ns", text, got[0].At)
		}
	})
}

func TestBadLinesAreNamed(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"1\n2\nx\n", `f:3: "x" is not a time in seconds`},
		{"offset_seconds,key\n", `f:1: "offset_seconds" is not a time in seconds`},
		{"1\n\n,g\n", `f:3: "" is not a time in seconds`},
		{"1 2\n", `f:1: "1 2" is not a time in seconds`},
		{"0x10\n", `f:1: "0x10" is not a time in seconds`},
		{"1_0\n", `f:1: "1_0" is not a time in seconds`},
		{"nan\n", `f:1: "nan" is not a time in seconds`},
		{"-Inf\n", `f:1: "-Inf" is not a time in seconds`},
		{"--1\n", `f:1: "--1" is not a time in seconds`},
		{".\n", `f:1: "." is not a time in seconds`},
		{"1.2.3\n", `f:1: "1.2.3" is not a time in seconds`},
		{"\x00\n", `f:1: "\x00" is not a time in seconds`},
		{"0,a,b,c\n", "f:1: 4 fields, want seconds[,key[,publisher]]"},
		{"4000000001\n", "f:1: 4000000001 s is out of range, want -4000000000 to 4000000000"},
		{"-4000000000.000000001\n", "f:1: -4000000000.000000001 s is out of range, want -4000000000 to 4000000000"},
		{"99999999999999999999999999\n", "f:1: 99999999999999999999999999 s is out of range, want -4000000000 to 4000000000"},
		{"1e999\n", "f:1: 1e999 s is out of range, want -4000000000 to 4000000000"},
		{"-1e12\n", "f:1: -1e12 s is out of range, want -4000000000 to 4000000000"},
		{"1\n" + strings.Repeat("0", 5000) + "\n", "f:2: longer than 4096 bytes"},
		{"", "f: no arrivals in it"},
		{"\n \n", "f: no arrivals in it"},
	} {
		got, err := bucket.Read("f", strings.NewReader(c.text))
		var e *bucket.Error
		if !errors.As(err, &e) || e.Error() != c.want {
			t.Errorf("%.40q: error %v, want %s", c.text, err, c.want)
		}
		if got != nil {
			t.Errorf("%.40q: %d arrivals came with the error", c.text, len(got))
		}
	}
}

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		testkit.Must(t, os.WriteFile(path, data, 0o644))
		return path
	}
	text := []byte("1,g\n2,g\n")
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	testkit.Result(z.Write(text)).Must(t)
	testkit.Must(t, z.Close())
	want, err := bucket.Read("f", bytes.NewReader(text))
	testkit.Must(t, err)
	for _, name := range []string{write("a.csv", text), write("a.csv.gz", packed.Bytes()), "-"} {
		got, err := bucket.ReadFile(name, bytes.NewReader(text))
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v (%v), want %v", name, got, err, want)
		}
	}
	_, err = bucket.ReadFile(filepath.Join(dir, "none"), nil)
	testkit.ErrorIs(t, err, fs.ErrNotExist, "a file that is not there")
	for _, name := range []string{write("b.gz", text), write("c.gz", packed.Bytes()[:packed.Len()-6]), write("d.gz", nil)} {
		_, err := bucket.ReadFile(name, nil)
		var e *bucket.Error
		if !errors.As(err, &e) || e.File != name {
			t.Errorf("%s: error %v, want one that names the file", name, err)
		}
	}
	if _, err := bucket.ReadFile("-", strings.NewReader("1\nx")); err == nil || !strings.HasPrefix(err.Error(), "standard input:2: ") {
		t.Errorf("bad standard input gave %v", err)
	}
}

// Read returns an error if and only if it returns no trace. A returned trace is in range and reads back the same.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{"0\n1.5,g,p\n", "1e9", "-0.0000000005,,x", "4000000000.0", "\n\n", "9,9,9,9", "1e-400"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := bucket.Read("f", strings.NewReader(text))
		if (err == nil) != (len(got) > 0) {
			t.Fatalf("%d arrivals with error %v", len(got), err)
		}
		var again strings.Builder
		for _, a := range got {
			const limit = bucket.MaxSeconds * 1e9
			if a.At > limit || a.At < -limit {
				t.Fatalf("%d is out of range", a.At)
			}
			abs, sign := a.At, ""
			if abs < 0 {
				abs, sign = -abs, "-"
			}
			fmt.Fprintf(&again, "%s%d.%09d,%s,%s\n", sign, abs/1e9, abs%1e9, a.Key, a.Publisher)
		}
		if err != nil {
			return
		}
		back, err := bucket.Read("f", strings.NewReader(again.String()))
		if err != nil || !slices.Equal(back, got) {
			t.Fatalf("%q reads back as %v (%v), not %v", again.String(), back, err, got)
		}
	})
}
