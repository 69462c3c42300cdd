package nftables

import (
	"errors"
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
// whether there was another change meanwhile.
func (c *Conn) Watch(name string, changed func()) error {
	sub, err := netlink.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return err
	}
	w := &watch{sub: sub, changed: changed}
	c.watch = w
	w.ended.Go(func() { w.run(name) })
	return nil
}

func (w *watch) run(name string) {
	for {
		concerned := false
		err := w.sub.Receive(func(typ uint16, body []byte) {
			concerned = concerned || concerns(typ, body, name)
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

// concerns reports whether a notification is of a table called name.
func concerns(typ uint16, body []byte, name string) bool {
	const genLen = 4 // nfgenmsg
	if typ>>8 != unix.NFNL_SUBSYS_NFTABLES || typ&0xff == unix.NFT_MSG_NEWGEN || len(body) < genLen {
		return false
	}
	// Attribute 1 of all these messages is the table's name (NFTA_TABLE_NAME,
	// NFTA_CHAIN_TABLE, NFTA_RULE_TABLE ...).
	return netlink.CString(netlink.Attr(body[genLen:], unix.NFTA_TABLE_NAME)) == name
}

func (w *watch) close() error {
	err := w.sub.Close()
	w.ended.Wait()
	return err
}

// unwatched calls commit with notifications off, and w.changed if somebody else
// made a change meanwhile.
func (c *Conn) unwatched(commit func() error) error {
	expected, before := c.Generation()
	left := c.watch.sub.Leave(unix.NFNLGRP_NFTABLES)
	err := commit()
	joined := c.watch.sub.Join(unix.NFNLGRP_NFTABLES)
	if err == nil {
		expected++
	}
	if now, after := c.Generation(); errors.Join(before, left, joined, after) != nil || now != expected {
		c.watch.changed()
	}
	return err
}
