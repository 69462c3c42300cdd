package nftables

import (
	"errors"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// watch reports changes that others make to the tables of one name.
type watch struct {
	sub     *netlink.Subscription
	changed func()
	ended   sync.WaitGroup
}

// Watch makes c call changed whenever anybody else has changed a table called
// name, of any family, or may have done so, until Close. changed is called from
// a goroutine of the Conn, or during Commit; it does not block. Elements that
// packets add to a set, or that time out, are no changes.
//
// Notifications are off while c itself commits, so that a load of a hundred
// thousand elements is not reported one by one; the count of generations tells
// whether there was another change in between.
func (c *Conn) Watch(name string, changed func()) error {
	return c.watchAll(func(_ Family, typ uint16, attrs []byte) bool {
		// Attribute 1 of all these messages is the table's name (NFTA_TABLE_NAME,
		// NFTA_CHAIN_TABLE, NFTA_RULE_TABLE ...).
		return typ != unix.NFT_MSG_NEWGEN && netlink.CString(netlink.Attr(attrs, unix.NFTA_TABLE_NAME)) == name
	}, changed)
}

// WatchChains is Watch for chains in tables that belong to several programs, as
// the transactions of iptables do: ours reports which are the caller's. A rule that another program
// removes from another chain of these tables may be one that leads there, and
// counts, too.
func (c *Conn) WatchChains(tables []string, ours func(chain string) bool, changed func()) error {
	return c.watchAll(func(f Family, typ uint16, attrs []byte) bool {
		text := func(attr uint16) string { return netlink.CString(netlink.Attr(attrs, attr)) }
		if f != IPv4 && f != IPv6 || !slices.Contains(tables, text(unix.NFTA_TABLE_NAME)) {
			return false
		}
		switch typ {
		case unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELRULE:
			return true
		case unix.NFT_MSG_NEWRULE:
			return ours(text(unix.NFTA_RULE_CHAIN))
		case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
			return ours(text(unix.NFTA_CHAIN_NAME))
		}
		return false
	}, changed)
}

// WatchHook is Watch for base chains of a hook, in all tables: their policies, and the
// rules in chains that are called as one of names, or as a chain of the hook that was
// made or changed since.
func (c *Conn) WatchHook(hook uint32, names []string, changed func()) error {
	known := map[string]bool{}
	for _, n := range names {
		known[n] = true
	}
	return c.watchAll(func(_ Family, typ uint16, attrs []byte) bool {
		switch typ {
		case unix.NFT_MSG_DELCHAIN: // newer kernels leave out its hook
			return known[netlink.CString(netlink.Attr(attrs, unix.NFTA_CHAIN_NAME))]
		case unix.NFT_MSG_NEWCHAIN:
			at := netlink.Attr(netlink.Attr(attrs, unix.NFTA_CHAIN_HOOK), unix.NFTA_HOOK_HOOKNUM)
			if at == nil || uint32At(at) != hook {
				return false
			}
			if name := netlink.CString(netlink.Attr(attrs, unix.NFTA_CHAIN_NAME)); len(known) < maxKnownChains {
				known[name] = true
			}
			return true
		case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
			return known[netlink.CString(netlink.Attr(attrs, unix.NFTA_RULE_CHAIN))]
		}
		return false
	}, changed)
}

// maxKnownChains bounds the names that WatchHook learns.
const maxKnownChains = 1000

// watchAll reports messages (their family, type and attributes) for which concerns
// returns true.
func (c *Conn) watchAll(concerns func(f Family, typ uint16, attrs []byte) bool, changed func()) error {
	sub, err := netlink.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return err
	}
	w := &watch{sub: sub, changed: changed}
	c.watch = w
	w.ended.Go(func() {
		w.run(func(typ uint16, body []byte) bool {
			const genLen = 4 // nfgenmsg
			return typ>>8 == unix.NFNL_SUBSYS_NFTABLES && len(body) >= genLen && concerns(Family(body[0]), typ&0xff, body[genLen:])
		})
	})
	return nil
}

func (w *watch) run(concerns func(typ uint16, body []byte) bool) {
	for {
		concerned := false
		err := w.sub.Receive(func(typ uint16, body []byte) {
			concerned = concerned || concerns(typ, body)
		})
		switch {
		case errors.Is(err, unix.ENOBUFS):
			concerned = true
		case err != nil:
			return // closed
		}
		if concerned {
			w.changed()
		}
	}
}

func (w *watch) close() error {
	err := w.sub.Close()
	w.ended.Wait()
	return err
}

// Unwatched calls change, by which another program makes n transactions on behalf
// of the caller, with notifications off, as Commit does with its own.
func (c *Conn) Unwatched(n int, change func() error) error {
	return c.unwatched(uint32(n), change)
}

// unwatched calls commit with notifications off, and w.changed if another program
// made a change in between. n is how many transactions commit makes if it succeeds.
func (c *Conn) unwatched(n uint32, commit func() error) error {
	expected, before := c.Generation()
	left := c.watch.sub.Leave(unix.NFNLGRP_NFTABLES)
	err := commit()
	joined := c.watch.sub.Join(unix.NFNLGRP_NFTABLES)
	if err == nil {
		expected += n
	}
	if now, after := c.Generation(); errors.Join(before, left, joined, after) != nil || now != expected {
		c.watch.changed()
	}
	return err
}
