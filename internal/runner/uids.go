package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// UIDRange are otherwise unused users and groups of the machine: each namespace
// gets idsPerNamespace of them, for its Pods that are not allowed to be privileged.
type UIDRange struct{ First, Last uint32 }

// DefaultUIDRange lies behind the users of containers in systemd's list of what is used
// (https://systemd.io/UIDS-GIDS), and has room for 4,096 namespaces.
var DefaultUIDRange = UIDRange{0x7000_0000, 0x7fff_ffff}

// idsPerNamespace is how many users a Pod can name: all that 16 bits can.
const idsPerNamespace = 1 << 16

// ParseUIDRange reads FIRST-LAST.
func ParseUIDRange(s string) (UIDRange, error) {
	a, b, ok := strings.Cut(s, "-")
	first, err1 := strconv.ParseUint(a, 10, 32)
	last, err2 := strconv.ParseUint(b, 10, 32)
	// The last number of all is no user (setresuid(2)).
	if !ok || err1 != nil || err2 != nil || first < idsPerNamespace || last < first+idsPerNamespace-1 || last >= 1<<32-1 {
		return UIDRange{}, fmt.Errorf("range of users %q: want FIRST-LAST with at least %d users from %d on, such as %s",
			s, idsPerNamespace, idsPerNamespace, DefaultUIDRange)
	}
	return UIDRange{uint32(first), uint32(last)}, nil
}

func (r UIDRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// slots is how many namespaces have room.
func (r UIDRange) slots() uint32 { return (r.Last - r.First + 1) / idsPerNamespace }

// uids knows the users of each namespace; they stay the same while the node has a Pod of
// the namespace, and over restarts.
type uids struct {
	ids  UIDRange
	file string

	mu   sync.Mutex
	slot map[string]uint32
}

func loadUIDs(ids UIDRange, stateDir string) (*uids, error) {
	u := &uids{ids: ids, file: filepath.Join(stateDir, "uids.json"), slot: map[string]uint32{}}
	b, err := os.ReadFile(u.file)
	if errors.Is(err, os.ErrNotExist) {
		return u, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &u.slot)
	}
	if err != nil {
		return nil, fmt.Errorf("read the users of namespaces: %w", err)
	}
	return u, nil
}

// base returns the first user of a namespace. used reports whether the node has a Pod of
// a namespace; when no slot is free, those of namespaces without one are.
func (u *uids) base(namespace string, used func(string) bool) (uint32, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	slot, ok := u.slot[namespace]
	if !ok {
		if uint32(len(u.slot)) >= u.ids.slots() {
			for ns := range u.slot {
				if !used(ns) {
					delete(u.slot, ns)
				}
			}
		}
		taken := map[uint32]bool{}
		for _, s := range u.slot {
			taken[s] = true
		}
		for taken[slot] {
			slot++
		}
		if slot >= u.ids.slots() {
			return 0, fmt.Errorf("no users are left for namespace %s: Pods of %d namespaces have them all; widen --pod-uid-range",
				namespace, len(taken))
		}
		u.slot[namespace] = slot
		b, err := json.Marshal(u.slot)
		if err == nil {
			err = fileio.Replace(u.file, b, 0o600)
		}
		if err != nil {
			delete(u.slot, namespace)
			return 0, fmt.Errorf("record the users of namespace %s: %w", namespace, err)
		}
	}
	if slot >= u.ids.slots() {
		return 0, fmt.Errorf("the users of namespace %s are not in --pod-uid-range any more: end its Pods and remove %s", namespace, u.file)
	}
	return u.ids.First + slot*idsPerNamespace, nil
}
