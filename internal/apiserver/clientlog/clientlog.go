// Package clientlog sends the messages of etcd's clients to slog: messages that
// k8s.io/apiserver makes have a logger of zap's that writes JSON to stderr, made when
// that package is initialized (v0.37, storage/storagebackend/factory).
//
// It is made from a configuration that this package changes before: packages are
// initialized in the order of their paths as far as imports allow (Go specification,
// package initialization), this one imports little, and its path is before k8s.io.
package clientlog

import (
	"context"
	"log/slog"
	"maps"
	"sync/atomic"

	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
)

const encoding = "fairlead-slog"

//nolint:gochecknoglobals // the logger that it stands behind belongs to the process
var (
	target  atomic.Pointer[slog.Logger]
	buffers = buffer.NewPool()
)

func init() { //nolint:gochecknoinits // see the package's comment
	err := zap.RegisterEncoder(encoding, func(zapcore.EncoderConfig) (zapcore.Encoder, error) {
		return encoder{zapcore.NewMapObjectEncoder()}, nil
	})
	if err == nil {
		logutil.DefaultZapLoggerConfig.Encoding = encoding
	}
}

// Set sends the messages to log from now on, at level debug: the API server reports
// what its requests fail with itself. Before the first Set they are dropped.
func Set(log *slog.Logger) { target.Store(log) }

// encoder writes a message to target, and nothing to where its logger writes.
type encoder struct{ *zapcore.MapObjectEncoder }

// Clone returns a copy with the same fields.
func (e encoder) Clone() zapcore.Encoder {
	c := zapcore.NewMapObjectEncoder()
	maps.Copy(c.Fields, e.Fields)
	return encoder{c}
}

// EncodeEntry returns an empty buffer.
func (e encoder) EncodeEntry(m zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	log := target.Load()
	if log == nil || !log.Enabled(context.Background(), slog.LevelDebug) {
		return buffers.Get(), nil
	}
	all := e.Clone().(encoder)
	for _, f := range fields {
		f.AddTo(all)
	}
	attrs := []any{"component", m.LoggerName}
	for k, v := range all.Fields {
		if k == "error" {
			k = "err"
		}
		attrs = append(attrs, k, v)
	}
	log.Debug(m.Message, attrs...)
	return buffers.Get(), nil
}
