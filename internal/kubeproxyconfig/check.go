package kubeproxyconfig

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// release is the Kubernetes release whose kube-proxy this package follows, as major and minor version.
const (
	releaseMajor = 1
	releaseMinor = 37
)

// HiddenMetricsVersion returns what is wrong with a value of showHiddenMetricsForVersion: like kube-proxy it takes
// only the minor version before its own.
func HiddenMetricsVersion(s string) error {
	if want := fmt.Sprintf("%d.%d", releaseMajor, releaseMinor-1); s != "" && s != want {
		return fmt.Errorf("want %s: hidden metrics can be shown only for the minor version before %d.%d", want, releaseMajor, releaseMinor)
	}
	return nil
}

func within(least, most int64) func(string) error {
	return func(s string) error {
		if n, err := strconv.ParseInt(s, 10, 64); err != nil || n < least || n > most {
			return fmt.Errorf("want a number from %d to %d", least, most)
		}
		return nil
	}
}

func number(s string) error {
	if _, err := strconv.ParseFloat(s, 32); err != nil {
		return errors.New("want a number")
	}
	return nil
}

func oneOf(values ...string) func(string) error {
	return func(s string) error {
		if !slices.Contains(values, s) {
			return fmt.Errorf("want %s or %s", strings.Join(values[:len(values)-1], ", "), values[len(values)-1])
		}
		return nil
	}
}

// notNegative takes durations; a time without a unit is in nanoseconds, as in JSON.
func notNegative(s string) error {
	if d, err := time.ParseDuration(s); err != nil || d < 0 {
		return errors.New("want a time of 0 or more, such as 30s")
	}
	return nil
}

func positive(s string) error {
	if d, err := time.ParseDuration(s); err != nil || d <= 0 {
		return errors.New("want a time of more than 0, such as 30s")
	}
	return nil
}

func address(s string) error {
	if _, err := netip.ParseAddr(s); err != nil {
		return errors.New("want an IP address")
	}
	return nil
}

// addressAndPort takes an address without a port, too.
func addressAndPort(s string) error {
	if address(s) == nil {
		return nil
	}
	host, port, err := net.SplitHostPort(s)
	if err == nil {
		err = address(host)
	}
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 {
		return errors.New("want IP:PORT with a port from 1 to 65535, or an IP address")
	}
	return nil
}

func prefix(s string) error {
	if _, err := netip.ParsePrefix(s); err != nil {
		return errors.New("want a range of addresses such as 192.0.2.0/24")
	}
	return nil
}

// prefixes takes one range, or one of each family, separated by a comma.
func prefixes(s string) error {
	families := map[bool]int{}
	for _, part := range strings.Split(s, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil {
			return errors.New("want a range of addresses such as 10.244.0.0/16, or one of each family separated by a comma")
		}
		families[p.Addr().Is4()]++
	}
	if families[true] > 1 || families[false] > 1 {
		return errors.New("want at most one range of each family")
	}
	return nil
}

func nodePortAddress(s string) error {
	if !slices.Contains([]string{"primary", "localhost", "all"}, s) && prefix(s) != nil {
		return errors.New("want primary, localhost, all, or a range of addresses such as 192.0.2.0/24")
	}
	return nil
}
