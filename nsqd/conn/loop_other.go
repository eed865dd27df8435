//go:build !linux

package conn

import (
	"errors"

	"github.com/srtm-io/srtm/internal/mono"
)

// loop is Linux's alone: elsewhere there is none, and no client on one.
type loop struct{}

type seat struct{ patient bool }

var errNoLoops = errors.New("event loops need Linux")

func newLoop(*Server) (*loop, error) { return nil, errNoLoops }

func (*loop) post(*client)  {}
func (*loop) sever(*client) {}
func (*loop) stop()         {}
func (*loop) run()          {}

func (*seat) lock() bool { return true }
func (*seat) unlock()    {}

func (*seat) hold(_ *task, why error) error          { return why }
func (*seat) admits(*client, *task, mono.Time) error { return nil }
