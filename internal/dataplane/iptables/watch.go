package iptables

import (
	"bytes"
	"context"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// watchedTool is a tool of variant nft. The kernel reports what other programs do
// to the tables; what the tool does is left out.
type watchedTool struct {
	tool
	conn *nftables.Conn
}

// Restore is the tool's. Each COMMIT is a transaction.
func (w *watchedTool) Restore(ctx context.Context, input []byte) error {
	return w.conn.Unwatched(bytes.Count(input, []byte("COMMIT\n")), func() error { return w.tool.Restore(ctx, input) })
}

// watch makes Changed tell of changes by other programs, in the network namespace of
// the calling thread. Variant legacy has nothing that could be watched.
func (m *Mode) watch() error {
	c, err := nftables.Dial()
	if err != nil {
		return err
	}
	if err := c.WatchChains([]string{tableNAT, tableFilter}, ours, m.Notify); err != nil {
		_ = c.Close()
		return err
	}
	m.watched = c
	for _, t := range m.targets {
		t.tool = &watchedTool{t.tool, c}
	}
	return nil
}
