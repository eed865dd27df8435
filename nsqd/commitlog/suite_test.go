package commitlog_test

import (
	"testing"

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
					var err error
					if dir, err = commitlog.OpenDir(path, commitlog.OS()); err != nil {
						t.Fatal(err)
					}
					cfg.Dir, cfg.Name = dir, "topic"
					if l, err = commitlog.Open(cfg); err != nil {
						t.Fatal(err)
					}
					return l
				}
				shut := func() {
					if err := l.Close(); err != nil {
						t.Error(err)
					}
					if err := dir.Close(); err != nil {
						t.Error(err)
					}
				}
				t.Cleanup(func() { shut() })
				return logtest.Subject{Log: open(), Reopen: func() commitlog.Log {
					shut()
					return open()
				}}
			})
		})
	}
}
