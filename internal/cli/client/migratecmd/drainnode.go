package migratecmd

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/drain"
)

// drainNode is what the Pods run that wait for the connections of kube-proxy's mode ipvs.
func (c *command) drainNode() *cobra.Command {
	var within time.Duration
	var undo bool
	cmd := &cobra.Command{
		Use: "drain-node", Hidden: true, Args: base.NoArgs, Short: "Wait for the connections of IPVS (run by 'fairlead migrate')",
		Long: `Wait until no connection of TCP or SCTP depends on the rules of kube-proxy's mode ipvs on this
node. If some still do, the exit code is 75. From now on, datagrams of UDP meet the rules of
fairlead proxy, and new connections of the node over IPv4 begin at the address that it sends
from to other networks, if there is one.`,
		Example: "  fairlead migrate drain-node --within 5s\n  fairlead migrate drain-node --undo",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if undo {
				return drain.Undo()
			}
			left, err := drain.IPVS(cmd.Context(), within)
			if err != nil {
				return err
			}
			fmt.Fprintln(c.Out, left.String())
			if left.Open > 0 {
				return base.ExitCodeError(migrate.StillOpen)
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&within, "within", 5*time.Second, "how long to wait")
	cmd.Flags().BoolVar(&undo, "undo", false, "let connections of the node begin at the address of the Service again, and wait for nothing")
	return cmd
}
