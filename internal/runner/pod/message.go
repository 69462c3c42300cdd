package pod

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/runner/logfile"
	"github.com/fairlead/fairlead/internal/runner/shim"
)

// Limits of a termination message, kubelet's: of the file, and of the end of the log
// that takes its place.
const (
	maxMessage      = 4096
	maxMessageLog   = 2048
	maxMessageLines = 80
)

// messageBind lays the file of an attempt's termination message over the path where the
// container writes it.
func (p Paths) messageBind(c *corev1.Container, attempt int) mount.Bind {
	path := c.TerminationMessagePath
	if path == "" {
		path = corev1.TerminationMessagePathDefault
	}
	// Optional: the shim of an earlier version does not know MakeFile.
	return mount.Bind{Source: p.message(c.Name, attempt), Target: path, MakeFile: true, Optional: true}
}

// readMessage returns the termination message of an attempt that has ended: what it has
// written, or, if it failed and asks for that, the end of its log.
func (p Paths) readMessage(ctx context.Context, c *corev1.Container, st *shim.State) (string, error) {
	f, err := os.Open(p.message(c.Name, st.Attempt))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil // an attempt of an earlier version
		}
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxMessage))
	if err != nil || len(text) > 0 || c.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError || st.ExitCode == 0 {
		return string(text), err
	}
	var log bytes.Buffer
	err = logfile.Read(ctx, p.Log(c.Name, st.Attempt), logfile.Query{Tail: ptr.To(int64(maxMessageLines))}, &log, nil)
	end := log.Bytes()
	return string(end[max(0, len(end)-maxMessageLog):]), err
}
