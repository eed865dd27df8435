package main

import (
	"context"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
)

// The log names a certificate fault between a loaddistributor and etcd. A new certificate of either
// side repairs the connection without a restart.
func TestCertificatesTowardsEtcd(t *testing.T) {
	authority := testkit.NewAuthority(t)
	etcd := etcdtest.Start(t, etcdtest.Config{Authority: authority})
	start := func(ca, cert, key string) *testkit.Buffer {
		t.Helper()
		program := new(options).program()
		_, level, err := program.Parse([]string{
			"--store=etcd", "--etcd-endpoint=" + etcd.URL, "--etcd-lease=2s", "--flex-lease=600ms", "--clock-bound=100ms",
			"--etcd-tls-ca=" + ca, "--etcd-tls-cert=" + cert, "--etcd-tls-key=" + key,
			"--grpc-address=" + testkit.Address(t), "--http-address=127.0.0.1:0", "--tcp-address=",
		}, io.Discard)
		testkit.Must(t, err)
		log := new(testkit.Buffer)
		testkit.Run(t, func(ctx context.Context) error {
			return program.Run(ctx, slog.New(slog.NewTextHandler(log, nil)), level)
		})
		return log
	}
	awaitLog := func(log *testkit.Buffer, what string, times int) {
		t.Helper()
		testkit.WaitUntil(t, func() string {
			if strings.Count(log.String(), what) >= times {
				return ""
			}
			return "not " + what + " in the log:\n" + log.String()
		})
	}
	valid := authority.Certificate("ld")
	awaitLog(start(testkit.NewAuthority(t).File, valid.CertFile, valid.KeyFile), "signed by unknown authority", 1)

	expired := authority.Expired("expired")
	log := start(authority.File, expired.CertFile, expired.KeyFile)
	awaitLog(log, "code = Unavailable", 1) // etcd logs the cause itself
	for to, from := range map[string]string{expired.CertFile: valid.CertFile, expired.KeyFile: valid.KeyFile} {
		testkit.Must(t, os.WriteFile(to, testkit.Result(os.ReadFile(from)).Must(t), 0o600))
	}
	awaitLog(log, "msg=leading", 1)

	etcd.Stop()
	awaitLog(log, "lost leadership", 1)
	authority.Certificate("etcd") // replaces the old certificate
	etcd.Restart()
	awaitLog(log, "msg=leading", 2)
}
