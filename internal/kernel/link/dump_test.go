package link_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Devices that come and go while they are listed are no error: the list is read
// again.
func TestListsAreWhole(t *testing.T) {
	testbed.NewNetwork(t).Outside("busy").Do(func() {
		// More than fit into one message of the kernel.
		for i := range 40 {
			if err := netlink.LinkAdd(pair(fmt.Sprintf("fltest%d", i))); err != nil {
				t.Fatal(err)
			}
		}
		interrupted := 0
		for range 20 {
			tries := 0
			_, err := link.Whole(func() ([]netlink.Link, error) {
				if tries++; tries > 2 { // who is disturbed each time gives up
					return netlink.LinkList()
				}
				change := make(chan error, 1)
				h, err := netlink.NewHandle() // of this namespace, for another thread
				if err != nil {
					return nil, err
				}
				defer h.Close()
				go func() {
					d := pair("fltest-other")
					change <- errors.Join(h.LinkAdd(d), h.LinkDel(d))
				}()
				links, err := netlink.LinkList()
				if errors.Is(err, netlink.ErrDumpInterrupted) {
					interrupted++
				}
				return links, errors.Join(err, <-change)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		t.Logf("%d lists were interrupted and read again", interrupted)
	})
	tries := 0
	got, err := link.Whole(func() ([]int, error) {
		if tries++; tries < 3 {
			return []int{1}, fmt.Errorf("list: %w", netlink.ErrDumpInterrupted)
		}
		return []int{1, 2}, nil
	})
	if err != nil || len(got) != 2 {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := link.Whole(func() ([]int, error) { return nil, netlink.ErrDumpInterrupted }); !errors.Is(err, netlink.ErrDumpInterrupted) {
		t.Errorf("without an end: %v", err)
	}
}

func pair(name string) *netlink.Veth {
	return &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
}
