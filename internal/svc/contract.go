package svc

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

// MaxWeight is the largest weight.
const MaxWeight = 256

// ParseWeight reads the value of WeightAnnotation, empty if there is none. An invalid weight
// counts as 1, and ok is false.
func ParseWeight(text string) (weight int, ok bool) {
	if text == "" {
		return 1, true
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > MaxWeight {
		return 1, false
	}
	return n, true
}

// Schedulers returns the names of the kernel's schedulers that SchedulerAnnotation may ask for.
func Schedulers() []string {
	return []string{"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "mh"}
}

// maxLabelValue is the longest value of a label; names of Nodes may be longer.
const maxLabelValue = 63

// NodeLabelValue returns the value of NodeLabel for a Node.
func NodeLabelValue(node string) string { return Shorten(node, maxLabelValue) }

// Shorten returns s if it is at most limit bytes long, and else a prefix of it
// with a hash of the whole, which keeps it unique.
func Shorten(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	id := hex.EncodeToString(sum[:5])
	return strings.TrimRight(s[:limit-len(id)-1], ".-") + "-" + id
}
