package direct

import (
	"fmt"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// Probe returns why packets cannot be passed on here, or nil. It asks the kernel for everything that is used, in a transaction that
// also takes it back.
func Probe() error {
	k, err := nftables.Dial()
	if err != nil {
		return fmt.Errorf("direct return: %w", err)
	}
	defer func() { _ = k.Close() }()
	for _, f := range socket.Families() {
		t := &Target{layout: newLayout(f), found: &found{}}
		t.layout.table.Name = TableName + "-probe"
		b := nftables.NewBatch()
		t.foundation(b, &dataplane.Settings{})
		b.DelTable(t.layout.table)
		if err := k.Commit(b); err != nil {
			return fmt.Errorf("direct return needs dup and hash of nf_tables (modules nft_dup_%s, nft_hash): %w", strings.ToLower(f.String()), err)
		}
	}
	return nil
}
