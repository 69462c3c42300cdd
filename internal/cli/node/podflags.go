package node

import (
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/agent"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/runner"
)

// DefaultManifestDir is where files of static Pods are.
const DefaultManifestDir = "/etc/fairlead/pods.d"

// PodFlags set up the Pods of a node.
type PodFlags struct {
	// ManifestDir has the files of static Pods, empty for none.
	ManifestDir string
	uids        string
	pids        int64
	maxPods     int64
	images      []string
	drainWait   time.Duration
	network     podNetworkFlags
}

func (f *PodFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.ManifestDir, "pod-manifest-dir", DefaultManifestDir,
		"directory of files of static Pods, which run without the API server; it must belong to root; empty for none")
	flags.StringVar(&f.uids, "pod-uid-range", runner.DefaultUIDRange.String(),
		"unused users and groups of this machine, FIRST-LAST: 65,536 for each namespace with Pods that are not allowed "+
			"to be privileged")
	flags.Int64Var(&f.pids, "pod-max-pids", runner.DefaultPodPIDs, "processes and threads of each Pod that is not allowed to be privileged")
	flags.Int64Var(&f.maxPods, "max-pods", agent.DefaultMaxPods,
		"Pods that the scheduler puts on this node at most, and no more than its range has addresses for "+
			"(--node-cidr-mask-size-ipv4 of the server)")
	flags.StringArrayVar(&f.images, "image-map", nil,
		"PREFIX=PROGRAM: the program of this machine that containers run as the entry point of images whose name begins with PREFIX, "+
			"as registry.example/echo=/usr/local/bin/echo; can be repeated")
	flags.DurationVar(&f.drainWait, "drain-wait", time.Second,
		"how long a Pod that is being deleted keeps running, at most, until no node sends it new connections; 0 for not at all")
	f.network.add(flags)
}

func (f *PodFlags) check() error {
	if f.drainWait < 0 {
		return base.Usagef("--drain-wait is %s; want 0 or more", f.drainWait)
	}
	if f.maxPods < 1 {
		return base.Usagef("--max-pods is %d; want 1 or more", f.maxPods)
	}
	if _, err := runner.ParseUIDRange(f.uids); err != nil {
		return base.Usagef("--pod-uid-range: %v", err)
	}
	if _, err := podspec.ParseImages(f.images); err != nil {
		return base.Usagef("--image-map: %v", err)
	}
	return f.network.check()
}

// podNetworkFlags set up how Pods of other nodes are reached.
type podNetworkFlags struct {
	kind          string
	vxlanVNI      uint32
	vxlanPort     uint16
	encrypt       encryption
	wireguardPort uint16
}

func (f *podNetworkFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.kind, "pod-network", string(runner.PodNetworkAuto),
		"how Pods of other nodes are reached, the same on every node: auto (neighbours directly, "+
			"other nodes by VXLAN), hostgw, vxlan, or none to leave it to the network")
	flags.Uint32Var(&f.vxlanVNI, "vxlan-vni", 2500, "number of the virtual network of VXLAN, the same on every node")
	flags.Uint16Var(&f.vxlanPort, "vxlan-port", 4789, "UDP port of VXLAN, the same on every node")
	f.encrypt = encryptOff
	flags.Var(&f.encrypt, "encrypt",
		"encrypt traffic to Pods of other nodes by WireGuard, whatever --pod-network is, the same on every node: required (nothing is sent "+
			"to Pods of a node that has no key), preferred (these are reached without encryption, while nodes begin or end to encrypt "+
			"one after the other), or off")
	flags.Lookup("encrypt").NoOptDefVal = string(encryptRequired)
	flags.Uint16Var(&f.wireguardPort, "wireguard-port", 51820, "UDP port of WireGuard, the same on every node")
}

// encryption is the value of --encrypt.
type encryption string

const (
	encryptOff       encryption = "off"
	encryptPreferred encryption = "preferred"
	encryptRequired  encryption = "required"
)

// String implements pflag.Value.
func (e *encryption) String() string { return string(*e) }

// Type implements pflag.Value.
func (*encryption) Type() string { return "string" }

// Set implements pflag.Value. It takes true and false as well, which were all values once.
func (e *encryption) Set(text string) error {
	if on, err := strconv.ParseBool(text); err == nil {
		if *e = encryptOff; on {
			*e = encryptRequired
		}
		return nil
	}
	all := []string{string(encryptRequired), string(encryptPreferred), string(encryptOff)}
	if !slices.Contains(all, text) {
		return errors.New("want " + base.OneOf(all))
	}
	*e = encryption(text)
	return nil
}

// maxVNI is the largest number of a virtual network of VXLAN (RFC 7348).
const maxVNI = 1<<24 - 1

func (f *podNetworkFlags) check() error {
	if !slices.Contains(runner.PodNetworks(), f.kind) {
		return base.Usagef("--pod-network %q: want %s", f.kind, base.OneOf(runner.PodNetworks()))
	}
	if f.vxlanVNI == 0 || f.vxlanVNI > maxVNI || f.vxlanPort == 0 || f.wireguardPort == 0 {
		return base.Usagef("--vxlan-vni must be 1 to %d, --vxlan-port and --wireguard-port 1 to 65535: other nodes have to know them", maxVNI)
	}
	return nil
}
