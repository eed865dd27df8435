package metadata

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
)

// ErrForeign means that a folder has data of NSQ's nsqd, which ours does not read.
var ErrForeign = errors.New("it has data of NSQ's nsqd, which this one does not read; nothing was changed")

// What NSQ's nsqd keeps in its folder. A queue's messages are in
// topic.diskqueue.NNNNNN.dat, or topic:channel.diskqueue.NNNNNN.dat; it goes on in
// the last file when all in it was delivered, and how far it is, in another file,
// may be seconds old after a crash. So a file of messages is taken to hold some.
var (
	foreignMessages = regexp.MustCompile(`\.diskqueue\.[0-9]+\.dat$`)
	foreignTopics   = "nsqd.dat"
)

// Foreign returns an ErrForeign that says what it found if dir has messages of
// NSQ's nsqd, or topics of it without our own metadata beside them: a channel that
// is not there when a message comes never gets it. A folder of it that names no
// topic has nothing to lose. own is our metadata's path.
func Foreign(dir, own string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	count, example := 0, ""
	for _, e := range entries {
		if foreignMessages.MatchString(e.Name()) {
			if info, err := e.Info(); err != nil || info.Size() > 0 { // gone or unreadable: look, at the next start
				count, example = count+1, e.Name()
			}
		}
	}
	if count > 0 {
		return fmt.Errorf("%w: messages in %d of its files, such as %q. Let NSQ's nsqd deliver them and name another folder here, "+
			"or move %s and *.diskqueue.*.dat away", ErrForeign, count, example, foreignTopics)
	}
	if _, err := os.Lstat(own); err == nil {
		return nil // an SRTM nsqd was here since
	}
	text, err := os.ReadFile(filepath.Join(dir, foreignTopics))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var state struct{ Topics []json.RawMessage }
	if err == nil {
		err = json.Unmarshal(text, &state)
	}
	if err != nil {
		return fmt.Errorf("%w: %s, which cannot be read: %w", ErrForeign, foreignTopics, err)
	}
	if len(state.Topics) > 0 {
		return fmt.Errorf("%w: %s names topics (%d), though none of their messages are there. Create them and their channels over HTTP at this nsqd "+
			"in another folder, or move %s away", ErrForeign, foreignTopics, len(state.Topics), foreignTopics)
	}
	return nil
}
