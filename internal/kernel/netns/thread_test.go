package netns_test

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

func TestOnThreadNeverUsesTheFirstThreadNorOneTwice(t *testing.T) {
	var mu sync.Mutex
	seen := map[int]int{}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			_ = netns.OnThread(func() error {
				mu.Lock()
				defer mu.Unlock()
				seen[unix.Gettid()]++
				return nil
			})
		})
	}
	wg.Wait()
	if seen[os.Getpid()] != 0 {
		t.Error("a function ran on the first thread")
	}
	if len(seen) == 0 {
		t.Error("nothing ran")
	}
}

func TestOnThreadReturnsErrors(t *testing.T) {
	want := errors.New("no")
	if err := netns.OnThread(func() error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
	if err := netns.OnThread(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("a goroutine that ended gave no error")
	}
}
