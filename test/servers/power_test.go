package servers

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// TestPowerLoss is losePower with one server; TestEmbeddedMembers has it with three.
func TestPowerLoss(t *testing.T) {
	losePower(t, 3, newMember(t, testbed.NewNetwork(t), "server1").start(t))
}

// losePower begins several times from what lay on the disks of all servers at a random moment of
// a load, with logs that end in the midst of a record: no write that was acknowledged before is
// missing. It leaves the servers with the last copy.
//
// A copy has what was written, synced or not: it shows the order of writes, not that each was
// synced, which is etcd's part.
func losePower(t *testing.T, copies int, all ...*member) {
	t.Helper()
	t.Logf("seed %d", *seed)
	rnd := rand.New(rand.NewPCG(*seed, uint64(len(all))))
	w := startWriters(t, "by", all)
	var images []image
	for range copies {
		w.more(t, 20+rnd.IntN(80))
		images = append(images, w.copy(t, rnd))
	}
	w.stop()
	for i, im := range images {
		for _, m := range all {
			m.Kill()
		}
		im.start(t, i)
	}
}

// image is what is on the disks of all servers at one moment.
type image struct {
	all          []*member
	dirs         []string
	acknowledged map[string]bool
}

// start starts the servers from the image.
func (im image) start(t *testing.T, number int) {
	t.Helper()
	for i, m := range im.all {
		m.at(im.dirs[i]).Start(t)
	}
	for _, m := range im.all {
		m.AwaitReady(t)
	}
	for _, m := range im.all {
		list, err := m.Client.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		has := map[string]bool{}
		for _, c := range list.Items {
			has[c.Name] = true
		}
		for name := range im.acknowledged {
			if !has[name] {
				t.Errorf("copy %d: %s has lost %s, which was acknowledged", number, m.name, name)
			}
		}
		t.Logf("copy %d: %s has %d objects, of which %d had been acknowledged", number, m.name, len(has), len(im.acknowledged))
	}
	testbed.Until(t, "a write", func() error { return im.all[0].write(t, fmt.Sprintf("after-%d", number)) })
}

// writers write through all servers, as fast as these answer.
type writers struct {
	all    []*member
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu           sync.Mutex
	acknowledged map[string]bool
	longest      time.Duration // of an acknowledged write
	failures     int
	failed       []string // the first of them
}

// startWriters writes objects whose names begin with prefix.
func startWriters(t *testing.T, prefix string, all []*member) *writers {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &writers{all: all, cancel: cancel, acknowledged: map[string]bool{}}
	t.Cleanup(w.stop)
	value := map[string]string{"value": strings.Repeat("sectors ", 500)}
	for i := range 4 {
		maps := all[i%len(all)].Client.CoreV1().ConfigMaps("default")
		w.wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				name := fmt.Sprintf("%s-%d-%d", prefix, i, n)
				object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: value}
				begin := time.Now()
				_, err := maps.Create(ctx, object, metav1.CreateOptions{})
				w.mu.Lock()
				switch {
				case err == nil:
					w.acknowledged[name] = true
					w.longest = max(w.longest, time.Since(begin))
				case ctx.Err() == nil:
					if apierrors.IsUnauthorized(err) { // its certificate ends soon, and the kubeconfig has the next one
						if _, client, err := all[i%len(all)].Connect(); err == nil {
							maps = client.CoreV1().ConfigMaps("default")
						}
					}
					if w.failures++; w.failures <= 10 {
						w.failed = append(w.failed, fmt.Sprintf("%s through %s: %v", name, all[i%len(all)].name, err))
					}
				}
				w.mu.Unlock()
			}
		})
	}
	return w
}

func (w *writers) stop() {
	w.cancel()
	w.wg.Wait()
}

// log logs what has become of the writes after stop.
func (w *writers) log(t *testing.T) {
	t.Helper()
	t.Logf("%d writes, the longest took %s, %d failed: %s", len(w.acknowledged), w.longest.Round(time.Millisecond), w.failures,
		strings.Join(w.failed, "\n"))
}

// known returns what has been acknowledged so far.
func (w *writers) known() map[string]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.acknowledged)
}

// more waits for n more writes.
func (w *writers) more(t *testing.T, n int) {
	t.Helper()
	goal := len(w.known()) + n
	testbed.Until(t, "writes", func() error {
		if now := len(w.known()); now < goal {
			return fmt.Errorf("%d of %d", now, goal)
		}
		return nil
	})
}

// copy takes an image while the servers stand still. Each log ends in the midst of the
// record that is written next: of one that was under way any sector may be on the disk.
func (w *writers) copy(t *testing.T, rnd *rand.Rand) image {
	t.Helper()
	im := image{all: w.all, acknowledged: w.known()}
	thaw := freeze(t, w.all)
	for _, m := range w.all {
		dir := filepath.Join(t.TempDir(), "data")
		process.Output(t, exec.Command("cp", "-a", "--sparse=always", m.dir, dir))
		im.dirs = append(im.dirs, dir)
	}
	thaw()
	w.more(t, 5)
	thaw = freeze(t, w.all)
	defer thaw()
	for i, m := range w.all {
		tear(t, lastLog(t, im.dirs[i]), lastLog(t, m.dir), rnd)
	}
	return im
}

// freeze stops all processes, and waits until each of their threads stands still.
func freeze(t *testing.T, all []*member) (thaw func()) {
	t.Helper()
	for _, m := range all {
		m.Signal(syscall.SIGSTOP)
	}
	for _, m := range all {
		testbed.Until(t, m.name+" to stand still", m.Stopped)
	}
	return func() {
		for _, m := range all {
			m.Signal(syscall.SIGCONT)
		}
	}
}

// lastLog is the file of etcd's log that is being written in a data directory.
func lastLog(t *testing.T, dir string) string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "etcd/member/wal/*.wal"))
	if err != nil || len(all) != 1 {
		t.Fatalf("the log is %v, %v; want one file", all, err)
	}
	return all[0]
}

// tear appends to a log the begin of the record that follows in a later one, as whole sectors of
// a disk: more of it would be a write that other servers may have to have, too. A record is its
// length in eight bytes, the last of which is for the padding to a multiple of eight, and itself
// (go.etcd.io/etcd/server/v3/storage/wal). Zeros follow, written in advance.
func tear(t *testing.T, log, later string, rnd *rand.Rand) {
	t.Helper()
	const word, sector = 8, 512
	text, err1 := os.ReadFile(log)
	next, err2 := os.ReadFile(later)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	begin := (len(bytes.TrimRight(text, "\x00")) + word - 1) / word * word
	end := begin + word + int(binary.LittleEndian.Uint64(next[begin:])&(1<<56-1))
	if end == begin+word {
		t.Logf("nothing was written after %d bytes", begin)
		return // the others are a majority
	}
	first, last := begin/sector+1, (end-1)/sector
	if first > last {
		return // it was written at once
	}
	cut := (first + rnd.IntN(last-first+1)) * sector
	f, err := os.OpenFile(log, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(next[begin:cut], int64(begin)); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes of a record of %d bytes are there", cut-begin, end-begin)
}
