package replicated_test

import (
	"flag"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// asNATS in the environment makes this program act as the linked nats-server.
const asNATS = "SRTM_TEST_NATS_SERVER"

func TestMain(m *testing.M) {
	if os.Getenv(asNATS) != "" {
		natsServer()
	}
	// A listener of nats.go misses the event CLOSED if it has ten events to read, and then stays
	// after the connection is closed.
	localtest.Main(m, goleak.IgnoreTopFunction("github.com/nats-io/nats.go/jetstream.(*jetStream).resetPendingAcksOnReconnect"))
}

func natsServer() {
	options, err := server.ConfigureOptions(flag.NewFlagSet("nats-server", flag.ExitOnError), os.Args[1:], nil, nil, nil)
	if err == nil {
		var s *server.Server
		if s, err = server.NewServer(options); err == nil {
			s.ConfigureLogger()
			err = server.Run(s)
		}
		if err == nil {
			s.WaitForShutdown()
			os.Exit(0)
		}
	}
	server.PrintAndDie(err.Error())
}

// natsProgram is the path of a nats-server, for this test's processes.
func natsProgram(t *testing.T) string {
	t.Helper()
	self := testkit.Result(os.Executable()).Must(t)
	t.Setenv(asNATS, "1")
	return self
}

// A cluster whose brokers keep everything on three nats-servers starts, delivers exactly once, and
// stops in order.
func TestUpReplicated(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), localtest.Program(t, "tools/srtm"), "up", "--replicated", "--nats-server="+natsProgram(t), "--data-dir="+dir,
		"--bin-dir="+localtest.Folder(t, "nsqd", "loaddistributor", "tbadaptor", "tools/iotpub"),
		"--publishers=20", "--group-size=5", "--duration=2s", "--calibration=0s", "--burst=20", "--max-lateness=10s")
	out, err := cmd.CombinedOutput() // exit code 0: nothing was lost
	if text := string(out); err != nil || !strings.Contains(text, "starting 3 brokers, three nats-servers") || !strings.Contains(text, "was delivered exactly once") {
		t.Fatalf("%v\n%s", err, text)
	}
	// The published messages are there, and nowhere else.
	_, err = os.Stat(dir + "/nats3-data/jetstream")
	testkit.NoError(t, err)
	entries := testkit.Result(os.ReadDir(dir)).Must(t)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "broker") && e.IsDir() {
			logs := testkit.Result(os.ReadDir(dir + "/" + e.Name() + "/messages")).Must(t)
			for _, l := range logs {
				if strings.HasSuffix(l.Name(), ".log") {
					t.Errorf("%s has a log in files: %s", e.Name(), l.Name())
				}
			}
		}
	}
}
