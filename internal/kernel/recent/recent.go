// Package recent reads and writes the lists of addresses that netfilter's match recent (xt_recent) keeps. A network namespace has one
// directory of lists for both address families; a list is there as long as a rule names it.
package recent

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// dir has the lists of the network namespace of the calling thread.
const dir = "/proc/thread-self/net/xt_recent"

// limitFile has how many addresses a list keeps, of this machine.
const limitFile = "/sys/module/xt_recent/parameters/ip_list_tot"

// defaultLimit is ip_list_tot where nothing says otherwise.
const defaultLimit = 100

// Lists are the lists of one network namespace. One goroutine uses them, on any thread.
type Lists struct {
	file *os.File // the directory; nil if there is none
	dir  string
}

// Open opens the lists of the network namespace of the calling thread.
func Open() (*Lists, error) {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return &Lists{}, nil
	}
	if err != nil {
		return nil, err
	}
	// By its descriptor other threads find the lists of this one's namespace.
	return &Lists{file: f, dir: fmt.Sprintf("/proc/self/fd/%d", f.Fd())}, nil
}

// None reports whether there is no directory of lists: then no rule has named one since the module was loaded.
func (l *Lists) None() bool { return l.file == nil }

// Close releases what Open has opened.
func (l *Lists) Close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

// Names returns the names of the lists.
func (l *Lists) Names() ([]string, error) {
	if l.file == nil {
		return nil, nil
	}
	all, err := os.ReadDir(l.dir)
	var out []string
	for _, e := range all {
		out = append(out, e.Name())
	}
	return out, err
}

// Addrs returns the addresses in a list, each with when it came last: a number that is higher for a later time. A list that is not
// there has none.
func (l *Lists) Addrs(name string) (map[netip.Addr]uint64, error) {
	out := map[netip.Addr]uint64{}
	if l.file == nil {
		return out, nil
	}
	text, err := os.Open(filepath.Join(l.dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	defer text.Close()
	lines := bufio.NewScanner(text) // src=10.244.0.7 ttl: 64 last_seen: 4295 oldest_pkt: 1 4295
	for lines.Scan() {
		source, rest, _ := strings.Cut(strings.TrimPrefix(lines.Text(), "src="), " ")
		var ttl, last uint64
		_, err := fmt.Sscanf(rest, "ttl: %d last_seen: %d", &ttl, &last)
		if a, err2 := netip.ParseAddr(source); err == nil && err2 == nil {
			out[a] = last
		}
	}
	return out, lines.Err()
}

// Add puts an address into a list, as if it had come now. In a full list it takes the place of the one that came first. Where there is
// no such list nothing happens.
func (l *Lists) Add(name string, a netip.Addr) error {
	if l.file == nil {
		return nil
	}
	list, err := os.OpenFile(filepath.Join(l.dir, name), os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = list.WriteString("+" + a.String() + "\n")
	return errors.Join(err, list.Close())
}

// Limit is how many addresses a list keeps.
func Limit() int {
	text, err := os.ReadFile(limitFile)
	n, err2 := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || err2 != nil {
		return defaultLimit
	}
	return n
}
