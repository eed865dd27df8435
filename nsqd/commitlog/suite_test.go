package commitlog_test

import (
	"errors"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/commitlog/logtest"
)

func TestFilesAsALog(t *testing.T) {
	for name, cfg := range map[string]commitlog.Config{
		"durable":       {Durable: true},
		"small files":   {SegmentBytes: 1 << 10},
		"that are kept": {SegmentBytes: 1 << 10, Retain: commitlog.Retain{Bytes: 1 << 12}},
	} {
		t.Run(name, func(t *testing.T) {
			logtest.Suite(t, func(t *testing.T) logtest.Subject {
				path := t.TempDir()
				var dir *commitlog.Dir
				var l *commitlog.Files
				open := func() commitlog.Log {
					dir = testkit.Result(commitlog.OpenDir(path, commitlog.OS())).Must(t)
					cfg.Dir, cfg.Name = dir, "topic"
					l = testkit.Result(commitlog.Open(cfg)).Must(t)
					return l
				}
				shut := func() { testkit.Must(t, errors.Join(l.Close(), dir.Close())) }
				t.Cleanup(shut)
				return logtest.Subject{Log: open(), Reopen: func() commitlog.Log {
					shut()
					return open()
				}}
			})
		})
	}
}
