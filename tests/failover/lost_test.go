package failover

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// page returns the commands of a page of docs/.
func page(t *testing.T, name string) (blocks []string) {
	t.Helper()
	text := testkit.Result(os.ReadFile(filepath.Join("..", "..", "docs", name))).Must(t)
	for i, part := range strings.Split(string(text), "```") {
		if commands, is := strings.CutPrefix(part, "sh\n"); is && i%2 == 1 {
			blocks = append(blocks, commands)
		}
	}
	return blocks
}

// What docs/backup.md says to do, while publishers publish: all are where they
// were, and a publisher that comes then finds its place.
func TestBackupAndRestore(t *testing.T) {
	const publishers, each = 4, 100
	commands := page(t, "backup.md")
	testkit.MustEqual(t, len(commands), 2, "the page has commands")
	bin, dir := localtest.Folder(t, "tools/srtm"), t.TempDir()
	c := newCluster(t, 1, 2, "--store=bbolt")
	do := func(commands string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", "-eu", "-c", commands)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "SRTM_LOADDISTRIBUTOR_ADDRESS="+c.grpc[0])
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", commands, err, out)
		}
	}
	spec := contract("t", 10_000, 1000, publishers+1)
	spec.PlacementPolicy = "loadbalance"
	c.create(spec)
	all := c.consume("t")
	cl := newClient(t, c)
	done := pace(t, cl, "t", publishers, each, 50*time.Millisecond, nil)
	testkit.WaitFor(t, "they publish", func() bool { return all.count() > publishers*each/10 })
	before := c.topic("t")
	do(commands[0])
	c.kill(0)
	testkit.Must(t, os.Remove(filepath.Join(c.dirs[0], "loaddistributor.db")))
	c.start(0)
	do(commands[1])
	testkit.WaitFor(t, "the topic is active again", func() bool { return c.topic("t").GetState() == srtmv1.TopicState_TOPIC_STATE_ACTIVE })
	if after := c.topic("t"); after.Epoch <= before.Epoch || len(after.Quotas) != len(before.Quotas) {
		t.Errorf("it was\n%v\nis\n%v", before, after)
	}
	late := publisher(t, cl, "t", publishers)
	testkit.NoError(t, late.Publish(t.Context(), body(publishers, 0)))
	finish(t, cl, all, append(<-done, 1))
}

// The store is lost, and the loaddistributor starts with an empty one: publishers continue
// where they are, for brokers hold the topic and its shares.
func TestPublishersOutliveALostStore(t *testing.T) {
	const publishers, each = 4, 100
	c := newCluster(t, 1, 2, "--store=bbolt")
	spec := contract("t", 10_000, 1000, publishers)
	spec.PlacementPolicy = "loadbalance"
	c.create(spec)
	all := c.consume("t")
	cl := newClient(t, c)
	done := pace(t, cl, "t", publishers, each, 50*time.Millisecond, nil)
	testkit.WaitFor(t, "they publish", func() bool { return all.count() > publishers*each/10 })
	c.kill(0)
	testkit.Must(t, os.Remove(filepath.Join(c.dirs[0], "loaddistributor.db")))
	c.start(0)
	sent := <-done
	finish(t, cl, all, sent)
	all.once(t, sent)
}
