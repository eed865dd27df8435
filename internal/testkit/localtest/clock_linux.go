package localtest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// clockEnv is the environment variable with the file of a program's Clock.
const clockEnv = "SRTM_TEST_CLOCK"

// million is the denominator of a clock's rate.
const million = 1_000_000

// Clock is the clock of a machine for programs of WithClock. A machine's clock may run
// too fast or too slow, and its CLOCK_REALTIME may be stepped while programs run. The
// kernel's arrival stamps still have the real time, so the programs must not use them.
type Clock struct {
	file   string
	shared *clockFile
}

// clockFile is a Clock in memory that the test and its programs share.
type clockFile struct {
	step atomic.Int64 // ns that CLOCK_REALTIME was stepped
	fast int64        // millionths that the clock is too fast
	base int64        // reading of CLOCK_MONOTONIC at which the machine's clock was right
}

// NewClock returns a clock that is too fast by the given number of millionths, or too
// slow if fast is negative.
func NewClock(t testing.TB, fast int64) *Clock {
	t.Helper()
	f := testkit.Result(os.Create(filepath.Join(t.TempDir(), "clock"))).Must(t)
	defer f.Close()
	const size = int(unsafe.Sizeof(clockFile{}))
	testkit.Must(t, f.Truncate(int64(size)))
	memory := testkit.Result(syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)).Must(t)
	t.Cleanup(func() { testkit.NoError(t, syscall.Munmap(memory)) })
	c := &Clock{f.Name(), (*clockFile)(unsafe.Pointer(&memory[0]))}
	c.shared.fast, c.shared.base = fast, int64(clock.Mono())
	return c
}

// Step steps the machine's CLOCK_REALTIME.
func (c *Clock) Step(distance time.Duration) { c.shared.step.Add(int64(distance)) }

// Stepped returns the sum of all steps.
func (c *Clock) Stepped() time.Duration { return time.Duration(c.shared.step.Load()) }

// Real returns the real time of a reading of the machine's CLOCK_MONOTONIC.
func (c *Clock) Real(reading mono.Time) mono.Time {
	since := int64(reading) - c.shared.base
	return reading - mono.Time(since*c.shared.fast/(million+c.shared.fast))
}

// Env returns the environment variable that gives the clock to a program of WithClock.
func (c *Clock) Env() string { return clockEnv + "=" + c.file }

// WithClock is Program with variants of the files that read clocks and set timers. They
// use the program's Clock. Programs of Go read clocks without the C library, so no
// library can replace the clock.
func WithClock(t testing.TB, pkg string) string {
	t.Helper()
	return build(t, pkg, "-clock", func() []string { return []string{"-overlay=" + overlay(t)} })
}

// patch is a change of one file.
type patch struct {
	file    string
	replace []string // pairs of an old text, which the file has once, and a new text
	add     string
}

var patches = []patch{
	{"GOROOT/src/runtime/time_nofake.go", []string{"\treturn nanotime1()\n", "\treturn skewed(nanotime1())\n"}, `
// skew is the memory of a Clock: its step, its rate, and its base.
//
//go:linkname skew
var skew *[3]int64

//go:nosplit
func skewed(now int64) int64 {
	if p := skew; p != nil {
		now += (now - p[2]) * p[1] / 1000000
	}
	return now
}
`},
	{"GOROOT/src/runtime/time.go", []string{"\treturn time_now()\n", `	sec, nsec, mono = time_now()
	if p := skew; p != nil {
		fast := skewed(mono) - mono
		mono += fast
		wall := sec*1000000000 + int64(nsec) + fast + p[0]
		sec, nsec = wall/1000000000, int32(wall%1000000000)
	}
	return sec, nsec, mono
`}, ""},
	{"SRTM/internal/clock/mono_linux.go", []string{"unix.ClockGettime(", "skewed(", "\t\"fmt\"\n", "\t\"fmt\"\n\t\"unsafe\"\n"}, `
// skew is declared here, so it is set before anchor.
var skew = openSkew()

//go:linkname runtimeSkew runtime.skew
var runtimeSkew *[3]int64

func openSkew() *[3]int64 {
	file, found := unix.Getenv("` + clockEnv + `")
	if !found {
		return nil
	}
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		panic(file + ": " + err.Error())
	}
	memory, err := unix.Mmap(fd, 0, 24, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		panic(file + ": " + err.Error())
	}
	unix.Close(fd)
	runtimeSkew = (*[3]int64)(unsafe.Pointer(&memory[0]))
	return runtimeSkew
}

func skewed(clock int32, ts *unix.Timespec) error {
	err := unix.ClockGettime(clock, ts)
	var mono unix.Timespec
	if skew != nil && err == nil && unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono) == nil {
		*ts = unix.NsecToTimespec(ts.Nano() + (mono.Nano()-skew[2])*skew[1]/1000000)
	}
	return err
}

// TimerfdSettime sets a timer for a time of the machine's CLOCK_MONOTONIC.
func TimerfdSettime(fd int, flags int, to, old *unix.ItimerSpec) error {
	at := to.Value.Nano()
	if skew == nil || at-skew[2] < 0 || at-skew[2] > 1e14 {
		return unix.TimerfdSettime(fd, flags, to, old)
	}
	return unix.TimerfdSettime(fd, flags, &unix.ItimerSpec{Value: unix.NsecToTimespec(at - (at-skew[2])*skew[1]/(1000000+skew[1]))}, old)
}
`},
	{"SRTM/internal/rawfd/poll_linux.go", timer, ""},
	{"SRTM/nsqd/broker/alarm_linux.go", timer, ""},
}

// timer is the change of a file with a timerfd.
var timer = []string{"unix.TimerfdSettime(", "skew.TimerfdSettime(", "import (\n", "import (\n\tskew \"github.com/srtm-io/srtm/internal/clock\"\n"}

// overlay writes the variants and returns the file that names them to go build.
func overlay(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(built.dir, "overlay")
	testkit.Must(t, os.MkdirAll(dir, 0o700))
	ask := func(args ...string) string {
		return strings.TrimSpace(string(testkit.Result(exec.Command("go", args...).Output()).Must(t)))
	}
	places := strings.NewReplacer("GOROOT", ask("env", "GOROOT"), "SRTM", ask("list", "-m", "-f", "{{.Dir}}", "github.com/srtm-io/srtm"))
	var files struct{ Replace map[string]string }
	files.Replace = map[string]string{}
	for i, p := range patches {
		file := places.Replace(p.file)
		text := string(testkit.Result(os.ReadFile(file)).Must(t))
		for j := 0; j < len(p.replace); j += 2 {
			testkit.MustEqual(t, strings.Count(text, p.replace[j]), 1, "%q in %s", p.replace[j], file)
			text = strings.Replace(text, p.replace[j], p.replace[j+1], 1)
		}
		destination := filepath.Join(dir, fmt.Sprintf("%d-%s", i, filepath.Base(file)))
		testkit.Must(t, os.WriteFile(destination, []byte(text+p.add), 0o600))
		files.Replace[file] = destination
	}
	list := filepath.Join(dir, "overlay.json")
	testkit.Must(t, os.WriteFile(list, testkit.Result(json.Marshal(files)).Must(t), 0o600))
	return list
}
