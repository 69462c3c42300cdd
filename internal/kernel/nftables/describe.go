package nftables

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netlink"
)

// Describe returns one rule of any program in words: its own text if fairlead wrote it, else its conditions and verdict as far as they
// are understood, with its comment. found is false if the rule is gone.
func Describe(c *Conn, t Table, chain string, handle uint64) (text string, found bool, err error) {
	var e netlink.Encoder
	e.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_ACK, uint8(t.Family), 0)
	e.String(unix.NFTA_RULE_TABLE, t.Name)
	e.String(unix.NFTA_RULE_CHAIN, chain)
	e.Uint64(unix.NFTA_RULE_HANDLE, handle)
	e.End()
	var rule []byte
	for try := 1; ; try++ {
		errs := c.nl.Ask(e.Buf, func(body []byte) { rule = bytes.Clone(body) })
		if len(errs) == 0 {
			break
		}
		if errors.Is(errs[0], unix.ENOENT) {
			return "", false, nil
		}
		if !transient(errs[0]) || try == attempts {
			return "", false, errs[0]
		}
	}
	ud := netlink.Attr(rule, unix.NFTA_RULE_USERDATA)
	if ours := netlink.CString(udataFind(ud, udText)); ours != "" {
		return ours, true, nil
	}
	if comment := netlink.CString(udataFind(ud, udComment)); comment != "" && len(udataFind(ud, udHash)) == 8 {
		return comment, true, nil // Rule.Comment
	}
	sets := setReader{conn: c, known: map[setName][]element{}, left: maxElements, decoded: maxDecoded}
	return sentence(decode(BaseChain{t, chain}, rule, &sets), commentOf(rule)), true, nil
}

// sentence says what a rule does, as its parts do.
func sentence(parts []Decoded, comment string) (text string) {
	if len(parts) > 0 {
		text = parts[0].String()
		if parts[0].Opaque {
			text += ", on more conditions"
		}
	}
	if len(parts) > 1 {
		text += fmt.Sprintf(" (and %d more of its set)", len(parts)-1)
	}
	if comment != "" {
		text += ", comment " + strconv.Quote(comment)
	}
	return text
}

// commentOf returns the comment of a rule of nft(8) or iptables(8).
func commentOf(rule []byte) string {
	if text := netlink.CString(udataFind(netlink.Attr(rule, unix.NFTA_RULE_USERDATA), udComment)); text != "" {
		return text
	}
	var text string
	netlink.Attrs(netlink.Attr(rule, unix.NFTA_RULE_EXPRESSIONS), func(_ uint16, expr []byte) {
		name, data := netlink.CString(netlink.Attr(expr, unix.NFTA_EXPR_NAME)), netlink.Attr(expr, unix.NFTA_EXPR_DATA)
		if name == "match" && netlink.CString(netlink.Attr(data, unix.NFTA_MATCH_NAME)) == "comment" {
			text = netlink.CString(netlink.Attr(data, unix.NFTA_MATCH_INFO))
		}
	})
	return text
}
