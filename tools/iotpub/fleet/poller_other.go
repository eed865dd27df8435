//go:build !linux

package fleet

import (
	"errors"

	"github.com/srtm-io/srtm/internal/mono"
)

var errLinux = errors.New("emulated publishers need Linux")

// poller takes the place of Linux's poller, which moves all bytes.
type poller struct{}

func newPoller() (*poller, error)                   { return nil, errLinux }
func (*poller) dial(int32, string) error            { return errLinux }
func (*poller) connected(int32) error               { return errLinux }
func (*poller) read(int32, []byte) (int, error)     { return 0, errLinux }
func (*poller) write(int32, []byte) (int, error)    { return 0, errLinux }
func (*poller) close(int32)                         {}
func (*poller) wait(d []event, _ mono.Time) []event { return d }
func (*poller) wake()                               {}
func (*poller) shutdown()                           {}
