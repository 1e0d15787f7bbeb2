"""LSTM encoders: the AWD-LSTM of Merity et al. 2018, and the two directions of ELMo (Peters et al. 2018).

Shapes: B rows, S tokens, I width of the input of a layer, C cells, P width of its output.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.contrib.ancestors.config import LstmConfig
from bert_jax.model.dropout import DropoutKey, Site, dropout, locked_dropout, site_key, whole_key
from bert_jax.model.layers import CACHE, INTERMEDIATES, Block
from bert_jax.parallel.axes import with_logical_axes


class LstmLayer(Block):
    """One LSTM layer (Hochreiter and Schmidhuber 1997), in float32. The state is reset to zero at the first token
    of each sequence and at every padding token.

    ``width``: outputs. ``cells``: their number; with ``has_projection``, a product without bias computes the
    outputs from them (Sak et al. 2014), otherwise there are as many. Gates are in the order input, forget, cell,
    output, as in torch; 1 is added to the forget gate, as TensorFlow does (Jozefowicz et al. 2015). ``cell_clip``
    and ``projection_clip`` of the config limit the cells and the projected outputs, as ELMo does.
    """

    config: LstmConfig
    width: int = 0
    cells: int = 0
    has_projection: bool = False
    is_backward: bool = False

    @nn.compact
    def __call__(
        self, x_BxSxI: jax.Array, tokens: Mapping[str, jax.Array], weights_key: DropoutKey | None
    ) -> jax.Array:
        """Return float32[B, S, P]. With ``cache_start`` among the ``tokens``, the state before the first column is
        that in the cache, where the last state is stored."""
        config, cells, width = self.config, self.cells, self.width
        recurrent_PxG = self._parameter("recurrent_kernel", (width, 4 * cells), nn.initializers.orthogonal())
        input_IxG = self._parameter("input_kernel", (x_BxSxI.shape[-1], 4 * cells), nn.initializers.lecun_normal())
        bias_G = self.param("bias", with_logical_axes(nn.initializers.zeros_init(), ("pooled",)), (4 * cells,))
        projection_CxP = None
        if self.has_projection:
            projection_CxP = self._parameter("projection_kernel", (cells, width), nn.initializers.lecun_normal())
        if config.lstm_weight_dropout and weights_key is not None:
            recurrent_PxG = dropout(recurrent_PxG, config.lstm_weight_dropout, whole_key(weights_key))
        gates_BxSxG = x_BxSxI.astype(jnp.float32) @ input_IxG + bias_G
        ids_BxS = tokens["sequence_ids"]
        batch = x_BxSxI.shape[0]
        state = jnp.zeros((batch, width)), jnp.zeros((batch, cells))
        first_id = jnp.zeros((batch,), ids_BxS.dtype)
        stored = None
        if "cache_start" in tokens:
            stored = self.variable(CACHE, "state", lambda: (*state, first_id))
            *both, first_id = stored.value
            state = both[0], both[1]
        if self.is_backward:
            gates_BxSxG, ids_BxS = gates_BxSxG[:, ::-1], ids_BxS[:, ::-1]
        before_BxS = jnp.concatenate([first_id[:, None], ids_BxS[:, :-1]], axis=1)
        goes_on_BxS = (ids_BxS == before_BxS) & (ids_BxS > 0)
        limit, projection_limit = config.lstm_cell_clip, config.lstm_projection_clip

        def step(
            state: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            gates, goes_on = inputs
            hidden, cell = (jnp.where(goes_on[:, None], part, 0.0) for part in state)
            enter, forget, new, out = jnp.split(gates + hidden @ recurrent_PxG, 4, axis=-1)
            cell = jax.nn.sigmoid(forget + 1.0) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
            cell = jnp.clip(cell, -limit, limit) if limit else cell
            hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
            if projection_CxP is not None:
                hidden = hidden @ projection_CxP
                hidden = jnp.clip(hidden, -projection_limit, projection_limit) if projection_limit else hidden
            return (hidden, cell), hidden

        last, output_SxBxP = jax.lax.scan(step, state, (gates_BxSxG.swapaxes(0, 1), goes_on_BxS.T))
        if stored is not None:
            stored.value = (*last, ids_BxS[:, -1])
        output_BxSxP = output_SxBxP.swapaxes(0, 1)
        return output_BxSxP[:, ::-1] if self.is_backward else output_BxSxP

    def _parameter(self, name: str, shape: tuple[int, int], init: jax.nn.initializers.Initializer) -> jax.Array:
        """Return a matrix with the initial values that Flax's LSTM cells have."""
        return self.param(name, with_logical_axes(init, ("embed", "pooled")), shape)


class LstmBlock(Block):
    """Layer ``layer`` (from 0): one LSTM layer per direction, each with ``width`` outputs and ``cells`` cells,
    which do not read each other. The output is the concatenation of the directions. Dropout is locked."""

    config: LstmConfig
    layer: int = 0
    width: int = 0
    cells: int = 0

    @nn.compact
    def __call__(
        self, x_BxSxI: jax.Array, tokens: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> jax.Array:
        config = self.config
        is_two = config.directions == 2
        parts = [x_BxSxI] if not is_two else [x_BxSxI, x_BxSxI] if self.layer == 0 else jnp.split(x_BxSxI, 2, -1)
        outputs = []
        for i, (part, name) in enumerate(zip(parts, ("forward", "backward"), strict=False)):
            layer = LstmLayer(
                config, self.execution, self.mesh, self.width, self.cells, is_two and config.lstm_cells > 0, i == 1,
                name=name,
            )  # fmt: skip
            number = self.layer + 1 + i * config.num_layers  # the directions drop other weights
            output = layer(part, tokens, site_key(dropout_key, number, Site.RECURRENT_WEIGHTS))
            outputs.append(output + part if config.lstm_skip and self.layer > 0 else output)
        x_BxSxH = jnp.concatenate(outputs, axis=-1)
        if self.is_mutable_collection(INTERMEDIATES):
            self.sow(INTERMEDIATES, "hidden_states", x_BxSxH)
        is_last = self.layer == config.num_layers - 1
        rate = config.dropout_at("feed_forward") if is_last else config.hidden_dropout
        return locked_dropout(x_BxSxH, rate, site_key(dropout_key, self.layer + 1, Site.FEED_FORWARD_OUTPUT))


class LstmEncoder(Block):
    """A stack of LSTM layers from left to right (``encoder`` lstm; Merity et al. 2018), or two that do not read
    each other (bidirectional_lstm; Peters et al. 2018, section 3.1)."""

    config: LstmConfig
    collect: bool = False

    @nn.compact
    def __call__(
        self, x_BxSxE: jax.Array, tokens: Mapping[str, jax.Array], dropout_key: DropoutKey | None
    ) -> tuple[jax.Array, jax.Array | None]:
        config, outputs = self.config, []
        x = x_BxSxE
        for i in range(config.num_layers):
            if config.directions == 2:
                width = config.hidden_size // 2
                cells = config.lstm_cells or width
            else:
                is_last = i == config.num_layers - 1
                width = cells = config.hidden_size if is_last else config.lstm_cells or config.hidden_size
            x = LstmBlock(config, self.execution, self.mesh, i, width, cells, name=f"layer_{i}")(
                x, tokens, dropout_key
            )
            outputs.append(x)
        return x, jnp.stack(outputs) if self.collect else None
